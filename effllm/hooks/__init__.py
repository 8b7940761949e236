"""What effllm knows about each training system, one file per system."""
