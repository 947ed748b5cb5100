"""The embedding model beside the model: its files, its tokens, its batches and whose turn it is."""
