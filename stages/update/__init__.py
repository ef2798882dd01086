"""Update: stored transitions and their advantages become new weights, with a record of every gradient share."""
