"""Mode `pod`: what runs in the containers of a pod besides the code, and how the server talks to them."""
