-- Remove a consumer group, and the entries that no other group needs.
-- KEYS[1] stream
-- ARGV    group
-- Returns the number of entries deleted.
--@include task facts pools pending capacity waiters groups membership

begin_writing()
local group = ARGV[1]
if not exists() or redis.call('SREM', key('groups'), group) == 0 then
  return 0
end
local deleted = 0
if #groups() > 0 then
  local seqs = {}
  for _, status in ipairs(rules().indexed and STATUSES or {'completed'}) do
    for _, member in ipairs(redis.call('ZRANGE', key('ready', pool_of(group, status)), 0, -1)) do
      seqs[#seqs + 1] = tonumber(member)
    end
  end
  each_leased(group, nil, function(seq)
    seqs[#seqs + 1] = seq
  end)
  for seq = number(key('group', group), 'cursor') + 1, number(task, 'last') do
    seqs[#seqs + 1] = seq
  end
  deleted = forget(group, seqs)
elseif rules().indexed then
  each_leased(group, nil, let_evict)
end
redis.call('XGROUP', 'DESTROY', stream, group)
drop_keys(group)
wake('#room', room_left(), now_ms())
return deleted
