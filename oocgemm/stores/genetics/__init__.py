"""Files of genetics: genotypes of PLINK 1, and relationship matrices of GCTA."""
