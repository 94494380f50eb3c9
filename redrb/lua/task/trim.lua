-- Delete a page of history that is too old or too much, or whose bytes a put needs.
-- KEYS[1] stream
-- ARGV    the call `Trim` of redrb/stream/task/calls.py
-- Returns the page
--@include task history permissions

check_permissions(KEYS[1])
begin_writing()
local ask, trimmed = cmsgpack.unpack(ARGV[1]), trim_history(PAGE.history_dropped)
return cmsgpack.pack({more = trimmed >= PAGE.history_dropped or free_history(ask.nbytes)})
