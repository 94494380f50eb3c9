-- Index the versions of waiting groups for a staleness rule that the task was given later, a page at a
-- time: the caller repeats.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task filling permissions

check_permissions(KEYS[1])
begin_writing()
return fill_versions() and 'more' or 'done'
