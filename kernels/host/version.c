#include "host.h"

const char ooc_sources[] = OOC_SOURCES;
