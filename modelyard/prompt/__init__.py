"""From a request to the prompt that a model reads: templates, conversations, tools, images."""
