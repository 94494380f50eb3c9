-- Fill the indexes of a rule of staleness that a task was given while groups waited, a page of the
-- facts at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task convert

begin_writing()
return fill_versions() and 'more' or 'done'
