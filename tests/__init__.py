"""Tests of oocgemm. Their processes multiply with threads that sleep when they have no work.

By default, a thread of OpenBLAS waits about 20 ms for its next product before it sleeps. After products as
small as those of tests, this takes more CPU time than the products.
"""

import os

# Two to this power is the number of cycles. OpenBLAS reads it when NumPy is imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
