"""From a task to training rows: prompts, parsing, environments off the event loop, rows."""
