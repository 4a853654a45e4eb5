"""Its place here puts tests/ on the import path, so that tests of every folder can import the helpers beside it."""
