"""Parts of one plan, for several processes: which tiles each one computes, and how many are worth using."""
