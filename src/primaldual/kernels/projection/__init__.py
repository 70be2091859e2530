"""The projections of a layer: queries, keys and values come out re-centred and pooled."""
