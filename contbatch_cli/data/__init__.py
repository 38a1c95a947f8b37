"""Rows, text and files: readers, tokenizer and chat template, records, writer, resume."""
