"""Query and use the operating system: memory, threads, processor time, and the user's cache folder."""
