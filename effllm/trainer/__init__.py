"""Code in the training process: it imports only the standard library, and no call in the loop waits or raises."""
