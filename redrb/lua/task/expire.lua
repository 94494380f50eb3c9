-- Expire groups of some statuses that are too stale, `limit` at a time: the caller repeats.
-- KEYS[1] stream
-- ARGV    the call `Expire` of redrb/stream/task/calls.py
-- Returns its reply; more while the consumer group joins
--@include task facts waking staleness membership permissions

check_permissions(KEYS[1])
begin_writing()
if not exists() then
  return cmsgpack.pack({expired = 0})
end
local ask, rule = cmsgpack.unpack(ARGV[1]), rules()
local group, limit, version = ask.group, ask.limit, ask.version
local by_version, by_token = ask.rules.max_staleness, ask.rules.max_token_staleness
if (by_version and not rule.max_staleness and rule.order ~= 'stalest')
  or (by_token and not rule.max_token_staleness) then
  return cmsgpack.pack({indexed = false})
end
if not join(group) then
  return cmsgpack.pack({more = true})
end
local cut = by_version and version - by_version - 1
local token_cut = by_token and version - by_token - 1
if ask.mode == 'look' then
  local due = {}
  for _, status in ipairs(ask.statuses) do
    for _, member in ipairs(overdue(pool_of(group, status), cut, token_cut, limit)) do
      due[#due + 1] = tonumber(member)
    end
  end
  return cmsgpack.pack({due = due})
end
local note = ask.mode == 'keep'
  and expiry_note(string.format('%.0f', version), by_version, by_token) .. ' ' .. ask.number
local expired = 0
for _, status in ipairs(ask.statuses) do
  if expired < limit then
    expired = expired + expire_pool(group, status, cut, token_cut, limit - expired, note)
  end
end
if expired > 0 then
  wake_room()
  wake_entered()
end
return cmsgpack.pack({expired = expired})
