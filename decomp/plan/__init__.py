"""What a step costs on a mesh, from shapes alone: the compiled program read, and closed forms beside it."""
