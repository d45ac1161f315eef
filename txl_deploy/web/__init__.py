"""Write packages for browsers: a folder to serve or a single file, with a page, the runtime for pages and a bundle."""
