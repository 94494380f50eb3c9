-- Delete a page of history that is too old or too much, or whose bytes a put needs: the caller repeats.
-- KEYS[1] stream
-- ARGV    bytes of the put; none: no put needs them
-- Returns 'more' | 'done'
--@include task history permissions

check_permissions(KEYS[1])
begin_writing()
local trimmed = trim_history(PAGE.history_dropped)
return (trimmed >= PAGE.history_dropped or free_history(tonumber(ARGV[1] or '0'))) and 'more' or 'done'
