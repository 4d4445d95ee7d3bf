"""The page that every daemon serves to the browser of its own machine."""
