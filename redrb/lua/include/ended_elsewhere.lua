-- Leases of which another client ends some groups: a checkpoint has trained them, or the consumer group ends.
--@include leases

-- Take the leases of entries, which XPENDING has listed, from their consumers, as another client ends these
-- entries. Heartbeats requeue what else the leases hold.
local function lose_all(group, pending)
  local lost = {}
  for _, entry in ipairs(pending) do
    local slot = entry[2]
    if not lost[slot] then
      lose(group, slot, false)
      lost[slot] = true
    end
  end
end
