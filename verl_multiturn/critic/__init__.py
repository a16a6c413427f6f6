"""ArCHer's utterance-level critic without verl and Ray: replay, encoders, twin Q and V, offline."""
