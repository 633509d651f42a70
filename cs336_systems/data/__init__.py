"""Corpora, documents, BERT's samples and tokenizers."""
