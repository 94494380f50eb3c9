-- Delete history whose time is over, a part of it at a time: the caller repeats.
-- KEYS[1] stream
-- Returns the number of entries deleted; 1000 and more: there may be more
--@include task history

begin_writing()
return trim_history(1000)
