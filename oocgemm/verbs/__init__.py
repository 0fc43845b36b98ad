"""The verbs of the library: each is a recipe of products in sequence, and shapes their result."""
