"""From files of prompts or conversations to token samples with a loss mask.

sources.py finds and reads files, formats.py turns one row into a conversation, template.py turns
conversations into token ids, masks.py says which of them are the answer, samples.py writes the
tokens parts, rejects.py counts what was left out. Nothing is imported here.
"""
