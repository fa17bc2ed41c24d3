"""What leaves the house: a draft or a data set with the card that tells where it comes from.

facts.py says what the run knows, licences.py what may be done with it, model_card.py and
dataset_card.py put both into words, weights.py and sglang.py give the draft its form, folder.py
writes OUT as a whole. Nothing here imports torch.
"""
