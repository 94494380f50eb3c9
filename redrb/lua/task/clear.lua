-- Delete the task: entries, consumer groups, ledger and settings. Some of its waiters are woken.
-- KEYS[1] stream
-- ARGV    incarnation
--         incarnation: of the task to delete. Repeated, the script deletes nothing, so a task that was
--         created meanwhile stays
-- Returns {'cleared', entries deleted} | {'gone'}: there is no task of this incarnation
--@include task membership permissions

if (redis.call('HGET', task, 'incarnation') or '') ~= ARGV[1] then
  return {'gone'}
end
check_permissions(KEYS[1])
begin_writing()
local stored = redis.call('XLEN', stream)
delete_task(groups())
return {'cleared', stored}
