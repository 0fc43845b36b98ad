"""The cost model: rates of a machine, memory that a plan takes, and the time that it takes."""
