"""How measurements are written: tables, plots, and sections of documents with their command and machine."""
