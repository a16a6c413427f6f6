"""What a recipe needs on GPUs: memory, seconds and hours, estimated before anything is started."""
