"""Search over an environment with snapshots, and the preference pairs that a tree yields."""
