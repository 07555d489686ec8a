"""Assembly of vendors' streams into the document that the vendor would have sent without streaming."""
