"""The parts of the page, one module each: from facts and measurements to blocks."""
