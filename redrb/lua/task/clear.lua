-- Delete the task: entries, consumer groups, ledger and settings. All waiters are woken.
-- KEYS[1] stream
-- Returns the number of entries deleted.
--@include task membership

local stored = redis.call('XLEN', stream)
begin_writing()
delete_task(groups(), now_ms())
return stored
