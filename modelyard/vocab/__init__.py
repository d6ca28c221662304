"""Token ids of text and text of token ids: tokenizers, the token cache, streaming detokenizers."""
