"""A file for each family of transformers' models: the module that is the model or a stage of it (extra ``hf``)."""
