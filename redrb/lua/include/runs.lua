-- Refuses processes of earlier runs of a table, and those that knew it before it was created anew.
--@include task

-- Refuse a request that must not change the table: its reply, or nil.
local function refusal(ask)
  local found = redis.call('HMGET', task, 'incarnation', 'run')
  if found[1] ~= ask.incarnation then
    return {outcome = 'gone'}
  elseif ask.in_run < tonumber(found[2] or '0') then
    return {outcome = 'stale', run = tonumber(found[2])}
  end
end
