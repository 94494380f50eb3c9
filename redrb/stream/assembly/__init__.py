"""Groups that are put in parts, by any number of makers: `stream.put_part`."""
