-- The pending list of a consumer group: its leased entries.
--@include task

-- Call `visit` with the seq of every entry that a group leases, or that one slot of it does, until it
-- returns true.
local function each_leased(group, slot, visit)
  local from = '-'
  while true do
    local pending = redis.call('XPENDING', stream, group, from, '+', 500, unpack({slot}))
    if #pending == 0 then
      return
    end
    for _, entry in ipairs(pending) do
      if visit(seq_of(entry[1])) then
        return
      end
    end
    from = '(' .. pending[#pending][1]
  end
end
