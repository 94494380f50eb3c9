-- Fill the indexes of a rule of staleness that a task was given while groups waited, a page of the
-- facts at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 1 where there is more, else 0
--@include task convert

begin_writing()
return fill_versions() and 1 or 0
