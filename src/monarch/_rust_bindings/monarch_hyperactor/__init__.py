"""Import paths that existing programs use; thin aliases, no logic. Nothing here is native code."""
