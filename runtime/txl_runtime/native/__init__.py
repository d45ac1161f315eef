"""The backend "native": a step of this project's own, in C, that `txl-deploy build` compiles for a processor."""
