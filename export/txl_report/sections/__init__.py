"""Turn facts and measurements into blocks, one module for each section of the page."""
