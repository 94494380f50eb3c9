-- Delete the task: entries, consumer groups, ledger and settings. Some of its waiters are woken.
-- KEYS[1] stream
-- ARGV    token
--         token: name of this call; repeated with the same token within KNOWN_MS it deletes nothing, so a
--         task that was created meanwhile stays
-- Returns the number of entries deleted, by this call or the one that it repeats.
--@include task membership

local KNOWN_MS = 3600000 -- longer than a client repeats a call

local cleared = key('cleared', ARGV[1])
local earlier = redis.call('GET', cleared)
if earlier then
  return tonumber(earlier)
end
begin_writing()
local stored = redis.call('XLEN', stream)
redis.call('SET', cleared, stored, 'PX', KNOWN_MS)
delete_task(groups())
return stored
