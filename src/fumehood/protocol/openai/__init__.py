"""Wire types of the OpenAI Responses, Files and Containers APIs."""
