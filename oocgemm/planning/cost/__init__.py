"""The cost model: the rates of a machine, and the memory and time that a plan takes on it."""
