"""Describe this machine, and measure the rates of its kernels, links, memory and storage."""
