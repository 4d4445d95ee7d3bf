"""nanochat's GPT for farandole: its shapes, its optimizers' rates, its files, and its measure."""
