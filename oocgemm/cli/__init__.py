"""The command line of oocgemm."""
