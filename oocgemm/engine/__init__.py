"""The engine: runs a schedule on a backend and on stores. This is the life of a tile."""
