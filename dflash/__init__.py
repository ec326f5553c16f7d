"""DFlash drafters: declare, generate, train, measure. See README.md in this folder for the map."""
