"""The sandbox server: runs model-written Python in isolated sandboxes, in process or behind HTTP."""
